"""Optimiser steps that also write the FP8 weights of the next forward pass."""
