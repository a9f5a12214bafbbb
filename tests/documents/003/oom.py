megatron_plugin = MegatronLMPlugin(
    pp_degree=4,
    num_micro_batches=16, # Increase from 4
)
