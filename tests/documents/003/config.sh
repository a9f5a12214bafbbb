accelerate config
