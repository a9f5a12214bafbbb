megatron_lm_plugin = MegatronLMPlugin(return_logits=True)
