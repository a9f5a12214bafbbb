# Reduce PP, increase TP
tp_degree=4 # Increase
pp_degree=2 # Decrease
