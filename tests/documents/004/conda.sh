conda create --name ml
