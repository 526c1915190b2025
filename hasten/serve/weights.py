"""Where a program's weights come from: an open model, a GGUF file, or a folder of safetensors.

A source gives the model without its numbers (`skeleton`), small parameters as floats (`dense`) and matrices
in panels (`panels`). Only `ModelSource` holds a dense copy of everything, the one that the caller opened.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hasten.base.errors import InputError, ShapeError, nearest
from hasten.ops.panels import BFLOAT16, FLOAT32, LANES, Format, Panels
from hasten.ops.panels.reference import pack
from hasten.serve.fingerprint import files_fingerprint, folder_files
from hasten.serve.program import Weight
from hasten.serve.quantise import Quantised, quantise

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hasten.serve.calibrate import Calibration

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HASH_BYTES = 1 << 24


class Source(Protocol):
    """What the lowering of a model asks for its weights."""

    calibration: Calibration | None
    """Second moments of the inputs of projections, used by `panels` where it quantises."""
    quantised: dict[str, Quantised]
    """Whole matrices by parameter that have codes already; `panels` takes them where the format is theirs."""

    @property
    def fingerprint(self) -> str:
        """A hash of the file or of the weights: part of the key of what is kept on disk."""

    def skeleton(self) -> PreTrainedModel:
        """The model in eval mode with its real buffers; its parameters may be on the meta device."""

    def dense(self, name: str) -> Tensor:
        """One parameter as a float tensor. Raises InputError for a name that is none."""

    def panels(self, weight: Weight, format: Format | None) -> Panels:
        """A matrix in panels of `format`; None: of the format that is nearest to what is stored.

        The same weight and format give the same object while anyone holds it, whatever the names: an output
        head that is the embedding is stored once. Raises InputError for a name that is no matrix.
        """

    def tokenizer(self) -> Any:
        """The transformers tokenizer, or None where there is none."""


class _Source:
    """What the sources share: names, parts of matrices, and one storage for what is asked for twice."""

    def __init__(self, calibration: Calibration | None = None) -> None:
        self.calibration = calibration
        self.quantised: dict[str, Quantised] = {}
        self._held: weakref.WeakValueDictionary[tuple[Any, ...], Panels] = weakref.WeakValueDictionary()

    def skeleton(self) -> Any:
        raise NotImplementedError

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Every name of a parameter -> the name under which it is listed."""
        first: dict[int, str] = {}
        return {
            name: first.setdefault(id(parameter), name)
            for name, parameter in self.skeleton().named_parameters(remove_duplicate=False)
        }

    def canonical(self, name: str) -> str:
        """The name under which a parameter is listed; one that shares its storage is listed once."""
        if name not in self.aliases:
            raise InputError(f"the model has no parameter {name!r}; {nearest(name, self.aliases)}")
        return self.aliases[name]

    def dense(self, name: str) -> Tensor:
        return self._dense(self.canonical(name)).float()

    def panels(self, weight: Weight, format: Format | None) -> Panels:
        name = self.canonical(weight.name)
        key = (name, weight.transposed, weight.rows, weight.columns, format)
        found = self._held.get(key)
        if found is None:
            found = self._stored(name, weight) if format is None else self._quantised(name, weight, format)
            self._held[key] = found
        return found

    def _dense(self, name: str) -> Tensor:
        raise NotImplementedError

    def _stored(self, name: str, weight: Weight) -> Panels:
        matrix = self._part(name, weight)
        return pack(matrix, FLOAT32 if matrix.dtype == torch.float32 else BFLOAT16)

    def _quantised(self, name: str, weight: Weight, format: Format) -> Panels:
        ready = self.quantised.get(name)
        if ready is not None and ready.format == format:
            part_of(self.skeleton().get_parameter(name), weight)  # raises where there is no such part
            try:
                found = ready.part(weight.rows, weight.columns)
            except ShapeError:
                pass  # columns that cut a group apart are quantised by themselves
            else:
                return found.panels()
        moments = self.calibration.moments.get(name) if self.calibration and not format.dense else None
        if moments is not None and weight.columns:
            part = slice(*weight.columns)
            moments = moments[part] if moments.dim() == 1 else moments[part, part]
        try:
            return quantise(self._part(name, weight), format, moments)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error

    def _part(self, name: str, weight: Weight) -> Tensor:
        return part_of(self._dense(name), weight)


def part_of(parameter: Tensor, weight: Weight) -> Tensor:
    """The matrix [N, K] that `weight` names, from its whole parameter.

    A stack of matrices [E, N, K] becomes one, each with rows of zeros up to a whole panel behind it.

    Raises InputError where that is no matrix or the part lies outside it.
    """
    if parameter.dim() == 3:
        stack = parameter.transpose(1, 2) if weight.transposed else parameter
        padding = -stack.shape[1] % LANES
        return torch.nn.functional.pad(stack, (0, 0, 0, padding)).reshape(-1, stack.shape[2])
    if parameter.dim() != 2:
        raise InputError(f"{weight.name} is no matrix but a tensor {list(parameter.shape)}")
    matrix = parameter.t() if weight.transposed else parameter
    for what, part, size in (
        ("rows", weight.rows, matrix.shape[0]),
        ("columns", weight.columns, matrix.shape[1]),
    ):
        if part is not None and not 0 <= part[0] < part[1] <= size:
            raise InputError(f"{weight.name}: {what} {part[0]} to {part[1]} of {size}")
    return matrix[slice(*(weight.rows or (None,))), slice(*(weight.columns or (None,)))]


class ModelSource(_Source):
    """The weights of a transformers model that is open. `dense` gives the parameter itself, not a copy."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any = None, calibration: Calibration | None = None
    ) -> None:
        super().__init__(calibration)
        self._model, self._tokenizer = model, tokenizer

    def skeleton(self) -> Any:
        return self._model

    def tokenizer(self) -> Any:
        return self._tokenizer

    @cached_property
    def fingerprint(self) -> str:
        """Of the configuration and of every byte of the parameters."""
        digest = hashlib.sha256(
            json.dumps(self._model.config.to_dict(), sort_keys=True, default=str).encode()
        )
        for name, parameter in self._model.named_parameters():
            digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}".encode())
            flat = parameter.detach().contiguous().view(-1).view(torch.uint8)
            for begin in range(0, flat.numel(), _HASH_BYTES):
                digest.update(flat[begin : begin + _HASH_BYTES].numpy().data)
        return digest.hexdigest()

    def _dense(self, name: str) -> Tensor:
        return self._model.get_parameter(name).detach()


class GgufSource(_Source):
    """The weights of a GGUF file, read one tensor at a time; blocks become panels of the same bits.

    Raises InputError for a file that is damaged or that does not hold the tensors of its architecture.
    """

    def __init__(self, path: str | Path, calibration: Calibration | None = None) -> None:
        from hasten.models.gguf_file import GgufFile
        from hasten.models.gguf_open import open_skeleton

        super().__init__(calibration)
        self.path = Path(path)
        self.file = GgufFile(path)
        self._model, self._names, self._settings = open_skeleton(self.file)

    def skeleton(self) -> Any:
        return self._model

    def tokenizer(self) -> Any:
        from hasten.models.gguf_open import open_tokenizer

        return open_tokenizer(self.file)

    @cached_property
    def fingerprint(self) -> str:
        return files_fingerprint([self.path])

    def _dense(self, name: str) -> Tensor:
        from hasten.models.gguf_open import read_tensor

        shape = tuple(self._model.get_parameter(name).shape)
        try:
            return read_tensor(self.file, self._names[name], shape, self._settings, torch.float32)
        finally:
            self.file.release()

    def _stored(self, name: str, weight: Weight) -> Panels:
        from hasten.models.gguf_map import stored_order
        from hasten.models.gguf_panels import gguf_panels, kind_name, stays_packed
        from hasten.ops.panels import GGUF, named

        stored, file = self._names[name], self.file
        part_of(self._model.get_parameter(name), weight)  # raises where there is no such part
        kind = kind_name(file, stored)
        if not stays_packed(file, stored):
            dense = {"F32": FLOAT32, "F16": BFLOAT16, "BF16": BFLOAT16}
            # A kind of few bits that panels do not have: eight bits lose next to nothing of it.
            return self._quantised(name, weight, dense.get(kind) or named("int8"))
        order, turned = stored_order(stored, file.tensors[stored].shape[0], file.architecture, self._settings)
        begin = weight.columns[0] if weight.columns else 0
        if turned != weight.transposed or begin % GGUF[kind].group:
            # Neither the transpose of blocks nor blocks cut apart are blocks.
            return self._quantised(name, weight, BFLOAT16)
        try:
            return gguf_panels(file, stored, order, weight.rows, weight.columns)
        finally:
            file.release()


class FolderSource(_Source):
    """The weights of a Hugging Face folder, read from its safetensors files one tensor at a time.

    Raises InputError where the folder has no safetensors or their names are not those of the model's
    parameters (old or converted checkpoints; open those as a model and take `ModelSource`).
    """

    def __init__(self, folder: str | Path, calibration: Calibration | None = None) -> None:
        super().__init__(calibration)
        self.folder = Path(folder)
        self._files = self._find()
        self._model = self._open()
        self._keys = self._match()

    def skeleton(self) -> Any:
        return self._model

    def tokenizer(self) -> Any:
        from hasten.models.open import open_folder_tokenizer

        return open_folder_tokenizer(self.folder)

    @cached_property
    def fingerprint(self) -> str:
        return files_fingerprint(folder_files(self.folder))

    def _find(self) -> dict[str, Path]:
        """Name of each stored tensor -> its file."""
        from safetensors import SafetensorError, safe_open

        index = self.folder / _INDEX
        try:
            if index.is_file():
                table = json.loads(index.read_text())["weight_map"]
                return {name: self.folder / Path(file).name for name, file in table.items()}
            file = self.folder / _SINGLE
            if not file.is_file():
                raise InputError(f"folder {self.folder} has neither {_SINGLE} nor {_INDEX}")
            with safe_open(file, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise InputError(f"cannot read the weights in {self.folder}: {error}") from error

    def _open(self) -> Any:
        from hasten.models.open import folder_skeleton

        return folder_skeleton(self.folder)

    def _match(self) -> dict[str, str]:
        prefix = f"{self._model.base_model_prefix}."
        found: dict[str, str] = {}
        for name, _ in self._model.named_parameters():
            # Some checkpoints hold the base model, without the name that the whole gives it.
            key = next((key for key in (name, name.removeprefix(prefix)) if key in self._files), None)
            if key is None:
                raise InputError(f"{self.folder} stores no tensor {name!r}; {nearest(name, self._files)}")
            found[name] = key
        return found

    def _dense(self, name: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        key = self._keys[name]
        try:
            with safe_open(self._files[key], framework="pt") as opened:
                tensor = opened.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{self._files[key]}: tensor {key!r} cannot be read: {error}") from error
        expected = tuple(self._model.get_parameter(name).shape)
        if tuple(tensor.shape) != expected:
            raise InputError(
                f"{self._files[key]}: tensor {key!r} is {list(tensor.shape)}; "
                f"the model needs {list(expected)}"
            )
        return tensor


def open_source(path: str | Path) -> GgufSource | FolderSource | ModelSource:
    """The source for what `hasten.models.open_model` opens, without a dense copy where that can be avoided.

    Raises InputError as `open_model` does.
    """
    from hasten.models.locate import locate
    from hasten.models.open import open_model

    place = locate(path)
    if place is not None and place.is_file():
        return GgufSource(place)
    if place is not None and (place / "config.json").is_file():
        try:
            return FolderSource(place)
        except InputError:
            pass  # not under the model's names: transformers converts it, or says what is wrong
    model, tokenizer = open_model(path)
    return ModelSource(model.eval(), tokenizer)
