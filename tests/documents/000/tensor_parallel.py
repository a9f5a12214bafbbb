# 层拆分到 2 个 GPU
# GPU 0: 注意力头的前半部分
# GPU 1: 注意力头的后半部分
# 每个 GPU 计算部分输出
# All-reduce 合并结果
