"""One model in training, between PyTorch and C++. (Public: what prepare() returns.)"""
