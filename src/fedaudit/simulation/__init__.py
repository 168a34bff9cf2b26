"""The federation: clients, server, the simulator, and the transcript of what travelled."""
