"""Models that keep no KV: encoders of text, images and sound, which a `config.json` describes much like a decoder.

Owns no state. A model type is refused by its name, by what its class is for (`architectures`), or because it reads
patches or samples and has no vocabulary. Always: what says that it is a decoder (`is_decoder`) is let pass, for such
a model keeps KV whatever its family.
"""

from kvtier.config.model_files import ModelFields

_TEXT = """
    albert bert big_bird bros camembert canine convbert data2vec-text deberta deberta-v2 distilbert dpr electra ernie
    ernie_m esm eurobert funnel gte ibert jina_embeddings_v3 layoutlm layoutlmv2 layoutlmv3 layoutxlm lilt
    longformer luke markuplm megatron-bert mobilebert modernbert mpnet mra nezha nomic_bert nystromformer qdqbert
    rembert roberta roberta-prelayernorm roc_bert roformer splinter squeezebert tapas visual_bert xlm-roberta
    xlm-roberta-xl xmod yoso
"""
_WITH_IMAGES_OR_SOUND = """
    aimv2 align altclip bridgetower chinese_clip clap clip clipseg clvp_encoder flava groupvit metaclip_2 owlv2 owlvit
    siglip siglip2 tipsv2 tvp videoprism vilt vision-text-dual-encoder xclip
"""
_SOUND = """
    audio-spectrogram-transformer data2vec-audio hubert sew sew-d unispeech unispeech-sat wav2vec2 wav2vec2-bert
    wav2vec2-conformer wavlm
"""
_IMAGES = "beit data2vec-vision deit vit vit_mae vit_msn"  # some have a vocabulary, of patches
ENCODERS = frozenset(f"{_TEXT} {_IMAGES} {_WITH_IMAGES_OR_SOUND} {_SOUND}".split())

_PART = ("_text_model", "_vision_model", "_image_model", "_multimodal_model")  # of a family above
_PART_WITHOUT_CACHE = ("_vision", "_vision_model", "_image_model", "_vit_model", "_audio", "_encoder", "_qformer")
_ARCHITECTURES = (
    "ForMaskedLM",
    "ForImageClassification",
    "ForMaskedImageModeling",
    "ForObjectDetection",
    "ForSemanticSegmentation",
    "ForCTC",
    "ForAudioClassification",
)
_NO_TEXT = ("patch_size", "image_size", "num_mel_bins", "conv_kernel_sizes", "conv_dim")


def refuse_without_cache(file: ModelFields, model: ModelFields) -> None:
    """model: the language model of `file`, or `file` itself. Raises ConfigError for one that keeps no KV."""
    if file.flag("is_decoder") or model.flag("is_decoder"):
        return
    if (model.text("model_type") or "").endswith(_PART_WITHOUT_CACHE):
        _refuse(model, "model_type", f"{model.text('model_type')!r} is an encoder")
    for fields in (file, model):
        model_type = fields.text("model_type") or ""
        if _family(model_type) in ENCODERS:
            _refuse(fields, "model_type", f"{model_type!r} is an encoder")
        for name in fields.texts("architectures") or ():
            if name.endswith(_ARCHITECTURES):
                _refuse(fields, "architectures", f"{name!r} is an encoder")
    seen = next((name for name in _NO_TEXT if model.has(name)), None)
    if seen and not model.has("vocab_size") and not model.flag("is_encoder_decoder"):
        _refuse(model, seen, "a model with this and without a vocab_size reads no text, and is an encoder")


def _family(model_type: str) -> str:
    for part in _PART:
        model_type = model_type.removesuffix(part)
    return model_type


def _refuse(fields: ModelFields, name: str, problem: str) -> None:
    remedy = "Pass the config.json of a model that writes text; if this one does, set is_decoder to true in it."
    raise fields.error(name, f"{problem}, which keeps no KV", remedy)
