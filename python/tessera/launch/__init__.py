"""What this process and its launcher tell each other. (Public: tessera.launchers.)"""
