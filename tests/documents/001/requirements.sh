cd Megatron-LM
pip install -r requirements.txt
