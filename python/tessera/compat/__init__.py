"""Accelerate's settings, choices and names of other engines. (Public: tessera.utils.)"""
