megatron_plugin = MegatronLMPlugin(
    use_distributed_optimizer=True, # Enable sharded optimizer
)
