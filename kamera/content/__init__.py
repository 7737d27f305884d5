"""Pictures, messages and text become chunks and segments of the model's own chat template; no forward."""

from kamera.content.borders import EXPONENT, LONGEST, SHORTEST, text_borders
from kamera.content.build import ChunkBuilder, Content, Spoken
from kamera.content.chunk import TOKEN_TYPES, Chunk, Encoded
from kamera.content.conversation import Conversations
from kamera.content.exclusive import exclusive_of
from kamera.content.fields import Fields, json_object
from kamera.content.forms import (
    MOST_LIKELY,
    REASONING,
    Format,
    anthropic_format,
    anthropic_messages,
    anthropic_tools,
    chat_format,
    chat_logprobs,
    chat_message,
    chat_tool,
    choose_tools,
    content_of,
    fits,
    hint_of,
    logprob_items,
    response_format,
    response_items,
    response_logprobs,
    tool_of,
)
from kamera.content.gear import Bits, Ids, Places, candidates, gear, hash_window
from kamera.content.image_only import load_image_only
from kamera.content.items import as_messages, kind_of, media_item, text_of, texts_of
from kamera.content.landmarks import LandmarkReader, Landmarks
from kamera.content.limits import MediaLimits
from kamera.content.media import Medium, load_image
from kamera.content.media_tokens import ProcessedMedia
from kamera.content.naming import names_media
from kamera.content.owned import own_messages, shown_message
from kamera.content.prefix import common_prefix
from kamera.content.segment import Extent, Rendered, Segment, SegmentKind
from kamera.content.template import (
    Message,
    Seams,
    check_messages,
    copy_message,
    media_items,
    tool_schema,
)
from kamera.content.video import Clip, load_media, read_video

__all__ = [
    "EXPONENT",
    "LONGEST",
    "MOST_LIKELY",
    "REASONING",
    "SHORTEST",
    "TOKEN_TYPES",
    "Bits",
    "Chunk",
    "ChunkBuilder",
    "Clip",
    "Content",
    "Conversations",
    "Encoded",
    "Extent",
    "Fields",
    "Format",
    "Ids",
    "LandmarkReader",
    "Landmarks",
    "MediaLimits",
    "Medium",
    "Message",
    "Places",
    "ProcessedMedia",
    "Rendered",
    "Seams",
    "Segment",
    "SegmentKind",
    "Spoken",
    "anthropic_format",
    "anthropic_messages",
    "anthropic_tools",
    "as_messages",
    "candidates",
    "chat_format",
    "chat_logprobs",
    "chat_message",
    "chat_tool",
    "check_messages",
    "choose_tools",
    "common_prefix",
    "content_of",
    "copy_message",
    "exclusive_of",
    "fits",
    "gear",
    "hash_window",
    "hint_of",
    "json_object",
    "kind_of",
    "load_image",
    "load_image_only",
    "load_media",
    "logprob_items",
    "media_item",
    "media_items",
    "names_media",
    "own_messages",
    "read_video",
    "response_format",
    "response_items",
    "response_logprobs",
    "shown_message",
    "text_borders",
    "text_of",
    "texts_of",
    "tool_of",
    "tool_schema",
]
