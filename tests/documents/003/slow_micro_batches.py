num_micro_batches=8 # Increase
