from accelerate import Accelerator
from accelerate.utils import MegatronLMPlugin

# Configure Megatron
megatron_plugin = MegatronLMPlugin(
    tp_degree=2, # Tensor parallelism degree
    pp_degree=2, # Pipeline parallelism degree
    num_micro_batches=4, # Micro-batches for pipeline
    gradient_clipping=1.0, # Gradient clipping value
    sequence_parallelism=False, # Enable sequence parallelism
    recompute_activations=True, # Activation checkpointing
    use_distributed_optimizer=True, # Distributed optimizer
    custom_prepare_model_function=None, # Custom model prep
)

# Initialize accelerator
accelerator = Accelerator(
    mixed_precision='bf16',
    megatron_lm_plugin=megatron_plugin
)

# Prepare model and optimizer
model, optimizer, train_dataloader = accelerator.prepare(
    model, optimizer, train_dataloader
)

# Training loop (same as DDP!)
for batch in train_dataloader:
    optimizer.zero_grad()
    outputs = model(**batch)
    loss = outputs.loss
    accelerator.backward(loss)
    optimizer.step()
