"""Names of weight files, as Hugging Face libraries know them. Tessera writes those with SAFE in their names; the others are
pickles of PyTorch, which it neither writes nor reads."""

MODEL_NAME = "pytorch_model"
WEIGHTS_NAME = "pytorch_model.bin"
WEIGHTS_PATTERN_NAME = "pytorch_model{suffix}.bin"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
SAFE_MODEL_NAME = "model"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_PATTERN_NAME = "model{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
PROFILE_PATTERN_NAME = "profile_{suffix}.json"
