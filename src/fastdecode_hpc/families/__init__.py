"""Families of decoders as data: what their files call things, and what their layers are made of."""
