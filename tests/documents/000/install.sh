# 克隆 Megatron-LM 仓库
git clone https://github.com/NVIDIA/Megatron-LM.git
cd Megatron-LM
pip install -e .
# 安装 Apex (NVIDIA 优化)
git clone https://github.com/NVIDIA/apex
cd apex
pip install -v --disable-pip-version-check --no-cache-dir --no-build-isolation
--config-settings "--build-option=--cpp_ext" --config-settings "--build-option=--cuda_ext" ./
