"""Checks of the teacher of on-policy distillation before models are loaded."""

from __future__ import annotations

from pathlib import Path

from megatron_brorl.config.rules import check_model
from megatron_brorl.config.schema import Config
from megatron_brorl.data.hub import model_directory
from megatron_brorl.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_difference
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import ModelShape, read_shape
from megatron_brorl.models import fp8
from megatron_brorl.models.gpt import check_layout

KEY = "teacher.path"


def teacher_directory(config: Config) -> Path:
    """Return the folder of the teacher. Raises UserError if there is none."""
    return model_directory(config.teacher.path, KEY)


def teacher_shape(config: Config) -> ModelShape:
    """Return the shape of the teacher. Raises UserError if it is not supported."""
    return read_shape(teacher_directory(config), KEY)


def check_teacher(config: Config, tokenizer: Tokenizer, context: int) -> ModelShape:
    """Return the shape of the teacher. Raises UserError unless it can score the rollouts of a student.

    tokenizer: that of the student. context: maximum tokens of a prompt with its response.
    """
    where = f"{KEY} = {config.teacher.path}"
    shape = teacher_shape(config)
    teacher_tokenizer = load_tokenizer(teacher_directory(config))
    if difference := tokenizer_difference(tokenizer, teacher_tokenizer):
        raise UserError(
            f"{where}: its tokenizer is not that of model.path: {difference}; choose a teacher of its family"
        )
    if (tokens := teacher_tokenizer.vocab_size) > shape.vocab:
        raise UserError(f"{where}: has {tokens} tokens and vocab_size = {shape.vocab}: copy its files again")
    if context > shape.context:
        raise UserError(
            f"{where}: max_position_embeddings = {shape.context} is less than the {context} tokens of a prompt with "
            f"its response: set model.context = {shape.context} or less"
        )
    try:
        check_layout(shape, config.parallel.tensor, config.parallel.pipeline)
        fp8.check(config.fp8, shape, config.parallel.tensor)
    except UserError as e:
        raise UserError(f"{where}: {e}") from None
    if shape.experts:
        check_model(config, shape.family, shape.experts, where)
    return shape
