"""Conversations become segments: the tokens of the model's own chat template, cut where they may move."""

from kamera.content.conversation import Conversations
from kamera.content.media_tokens import Media
from kamera.content.segment import Rendered, Segment, SegmentKind
from kamera.content.template import ChatTemplate, Message

__all__ = ["ChatTemplate", "Conversations", "Media", "Message", "Rendered", "Segment", "SegmentKind"]
