"""An OpenAI-compatible HTTP server over one engine; needs the extra ``kvquilt[server]``."""
