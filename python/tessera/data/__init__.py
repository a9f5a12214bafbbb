"""Batches, loaders and indexed files. (Public: tessera.data_loader.)"""
