"""Requests: bodies of the inference APIs and routing hints, read into typed values. Nothing here writes a body, but for
the name of its model (`splice.py`).
"""

from picker.requests.errors import BadRequest, OverLimit
from picker.requests.hints import Hints, HintTrust, Trust, is_control_header, parse_hints
from picker.requests.limits import BodyLimits
from picker.requests.parsing import parse_request
from picker.requests.prompts import ChatPrompt, Prompt, TextPrompts, TokenPrompts, Truncation
from picker.requests.request import InferenceRequest
from picker.requests.rewriting import RewriteStats, Rewriting, places_of_model
from picker.requests.routes import Route, route_of
from picker.requests.sessions import SessionSource
from picker.requests.splice import with_model
from picker.requests.subset import subset_hint

__all__ = [
    "BadRequest",
    "BodyLimits",
    "ChatPrompt",
    "HintTrust",
    "Hints",
    "InferenceRequest",
    "OverLimit",
    "Prompt",
    "RewriteStats",
    "Rewriting",
    "Route",
    "SessionSource",
    "TextPrompts",
    "TokenPrompts",
    "Truncation",
    "Trust",
    "is_control_header",
    "parse_hints",
    "parse_request",
    "places_of_model",
    "route_of",
    "subset_hint",
    "with_model",
]
