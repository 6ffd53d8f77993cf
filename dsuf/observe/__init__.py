"""What a node says about itself: logs, metrics, and the lag of its event loop.

Every layer may import this one; it imports only `errors` and `types`. Prompt text, reply text, pictures and keys never
reach it: a log line has a turn's name and its counts.
"""
