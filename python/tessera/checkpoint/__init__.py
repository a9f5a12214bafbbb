"""Folders and files of saved states. (Public: the Accelerator.)"""
