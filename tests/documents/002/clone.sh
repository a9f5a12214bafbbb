git clone https://github.com/NVIDIA/Megatron-LM.git
cd Megatron-LM
git checkout deepspeed-integration  # 切换到支持 DeepSpeed 的分支
