"""Processors for pictures and text without torchvision.

The stock classes of many families require a video processor, and every video processor of transformers needs
torchvision; without it `AutoProcessor` silently returns the bare tokenizer. Pictures need Pillow only, so
these models still accept them: in a window a clip's frames become pictures.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

from kamera.content.without_video import image_only


def load_image_only(name: str, model_type: str) -> Any | None:
    """The processor of a vision model without its video part; None for a model that has no processor.

    Raises ImportError for one that needs another package.
    """
    if model_type == "kimi_k25":
        from kamera.content.kimi_pictures import load_kimi_pictures

        return load_kimi_pictures(name)
    import transformers
    from transformers.processing_utils import ProcessorMixin

    settings, _ = ProcessorMixin.get_processor_dict(name)
    stock = _class_of(str(settings.get("processor_class", "")), model_type)
    if stock is None:
        return None
    names = stock.get_attributes()
    # Pillow's resize even with torchvision: the two differ in rounding, and with them the chunks' ids
    parts = {"image_processor": transformers.AutoImageProcessor.from_pretrained(name, backend="pil")}
    parts["tokenizer"] = tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    if "feature_extractor" in names:
        parts["feature_extractor"] = transformers.AutoFeatureExtractor.from_pretrained(name)
    options = {n: settings[n] for n in inspect.signature(stock.__init__).parameters if n in settings}
    options = {n: value for n, value in options.items() if n not in (*names, "chat_template")}
    template = settings.get("chat_template") or tokenizer.chat_template
    return image_only(stock)(**parts, **options, chat_template=template)


def _class_of(name: str, model_type: str) -> Any | None:
    """The stock class of a processor; transformers hides one that asks for torchvision at its own door."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    auto: Any = importlib.import_module("transformers.models.auto.processing_auto")
    classes: dict[str, str] = auto.PROCESSOR_MAPPING_NAMES
    name = name.removeprefix("ImageOnly") or classes.get(model_type, "")
    for family in [kind for kind, known in classes.items() if known == name]:
        module = _processing_of(model_type_to_module_name(family))
        if hasattr(module, name):
            return getattr(module, name)
    return None


def _processing_of(folder: str) -> Any | None:
    """The file of a family's processor; None for a family that takes another one's."""
    where = f"transformers.models.{folder}"
    try:
        return importlib.import_module(f"{where}.processing_{folder}")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            return None
    # Pixtral's asks for a function that the file of its Pillow processor has, too
    name = f"{where}.image_processing_{folder}"
    sys.modules[name] = importlib.import_module(f"{where}.image_processing_pil_{folder}")
    try:
        return importlib.import_module(f"{where}.processing_{folder}")
    finally:
        del sys.modules[name]
