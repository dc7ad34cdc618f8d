"""From a run's lines to figures with intervals and tests, and figures as tables and sentences."""
