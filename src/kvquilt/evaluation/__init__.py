"""Evaluation: tasks with known answers, metrics, and what they need of the models."""
