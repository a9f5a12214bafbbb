git clone https://github.com/NVIDIA/Megatron-LM.git
