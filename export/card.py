"""README.md of a model folder: what the model is and how to use it."""

from edgespec.manifest import Check, Manifest

NAME = "README.md"
# Agreement with the source: below the first value texts differ, below the second they suffer.
_OTHER, _WORSE = 0.9, 0.75


def quality(check: Check, form: str) -> str | None:
    """The effect of a low agreement with the source on texts; None where the agreement is high."""
    if check.agreement >= _OTHER:
        return None
    more = "fp16" if form == "npu" else "int8 or source"
    lost = f"At {1 - check.agreement:.0%} of positions it would choose another token than its source"
    is_usable = check.agreement >= _WORSE
    result = "its texts are others, and somewhat worse" if is_usable else "expect clearly worse texts"
    return f"{lost}: {result}. More bits (--precision {more}) keep more."


def model_card(manifest: Manifest) -> str:
    """The card in Markdown, made from the manifest alone."""
    source, check = manifest.source, manifest.check
    lines = [f"# {source.name}", ""]
    if manifest.head:
        what = "A drafting head for the model in the folder target/ beside it, exported by edgespec"
        use = "PAIR_FOLDER"
    elif manifest.vocab_subset:
        what = "A drafter with a trimmed head, for speculative decoding with edgespec"
        use = "TARGET --drafter THIS_FOLDER"
    else:
        what, use = "A language model in ONNX, exported by edgespec", "THIS_FOLDER"
    lines += [f"{what}:", "", f"    edgespec chat {use}", "", "| | |", "|---|---|"]
    rows = {
        "family": manifest.architecture,
        "precision": manifest.precision,
        "context": f"{manifest.context_length} tokens",
        "vocabulary": f"{manifest.vocab_size} tokens",
        "made from": f"{source.name} ({source.format})",
        "repository": source.repository,
        "revision": source.revision,
        "SHA-256 of the source": source.sha256,
        "licence": source.license or "not stated by the source; ask its authors",
    }
    if manifest.head:
        layers = ", ".join(map(str, manifest.head.target_layers))
        rows["reads"] = f"states of the target after layers {layers}; the number of its layers is the final norm"
    if manifest.self_drafter:
        rows["own drafter"] = f"layers {', '.join(map(str, manifest.self_drafter.layers))} (--drafter self)"
    lines += [*(f"| {name} | {value} |" for name, value in rows.items() if value is not None), ""]
    if manifest.head:
        lines.append("Its drafts are verified, so the texts of its target stay what they are without it.")
    elif check is None:
        lines.append("It was not compared with its source (`edgespec export` does, unless told not to).")
    else:
        lines.append(
            f"Compared with its source on {check.num_tokens} tokens: {check.nll:.4f} nats a token, the source has "
            f"{check.reference_nll:.4f}; divergence {check.divergence:.4f}, the same likeliest token at "
            f"{check.agreement:.0%}, and in pieces the logits differ by {check.pieces_difference:.2g} at most."
        )
        if check.one_row_difference is not None:
            lines.append(
                f"In passes over one token, as in plain decoding, they differ by {check.one_row_difference:.2g} "
                "at most from those of a pass over several, which other kernels serve."
            )
        if (words := quality(check, manifest.form)) is not None:
            lines += ["", words]
    lines += ["", "`edgespec models verify THIS_FOLDER` compares its files with their hashes.", ""]
    return "\n".join(lines)
