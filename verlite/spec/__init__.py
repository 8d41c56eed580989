"""What a run does, without the configuration that it came from.

`verlite.config` compiles the command line into these facts. Everything below it reads nothing else.
"""
