pip install megatron-lm accelerate
