# Resume training
accelerator.load_state('checkpoint-1000')
# Automatically loads correct shard per rank
