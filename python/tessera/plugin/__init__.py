"""MegatronLMPlugin: what it may hold, and the configuration that comes of it. (Public: tessera.utils.)"""
