"""From a configuration to an environment."""

from verifiers.v1 import Environment


def resolve_env_config(data):
    return data


def load_environment(config):
    return Environment(config)
