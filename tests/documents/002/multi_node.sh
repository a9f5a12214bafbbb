# 多节点训练(需配置 hosts 文件)
deepspeed --hostfile hostfile train.sh
