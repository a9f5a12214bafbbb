megatron_plugin = MegatronLMPlugin(
    recompute_activations=True, # Enable checkpointing
    checkpoint_num_layers=1, # Checkpoint every N layers
    distribute_checkpointed_activations=True, # Distribute across TP
    partition_activations=True, # Partition in PP
    check_for_nan_in_loss_and_grad=True, # Stability check
)
