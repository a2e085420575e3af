"""Reinforcement learning with verifiable rewards and hundreds of rollouts per prompt (BroRL) on Megatron-Core."""

__version__ = "0.1.0"
