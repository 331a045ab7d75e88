"""README.md of a model folder: what it is and how to use it, for whoever finds it."""

from edgespec.manifest import Manifest

NAME = "README.md"


def model_card(manifest: Manifest) -> str:
    """The card in Markdown, of what the manifest states alone."""
    source, check = manifest.source, manifest.check
    lines = [f"# {source.name}", ""]
    if manifest.vocab_subset:
        lines += ["A drafter with a trimmed head, for speculative decoding with edgespec:", ""]
        lines += ["    edgespec chat TARGET --drafter THIS_FOLDER"]
    else:
        lines += ["A language model in ONNX, exported by edgespec:", "", "    edgespec chat THIS_FOLDER"]
    lines += ["", "| | |", "|---|---|"]
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
    if manifest.self_drafter:
        rows["own drafter"] = f"layers {', '.join(map(str, manifest.self_drafter.layers))} (--drafter self)"
    lines += [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    lines.append("")
    if check is None:
        lines.append("It was not compared with its source (`edgespec export` does, unless told not to).")
    else:
        lines.append(
            f"Compared with its source on {check.num_tokens} tokens: {check.nll:.4f} nats a token, the source has "
            f"{check.reference_nll:.4f}; divergence {check.divergence:.4f}, the same likeliest token at "
            f"{check.agreement:.0%}, and in pieces the logits differ by {check.pieces_difference:.2g} at most."
        )
    lines += ["", "`edgespec models verify THIS_FOLDER` compares its files with their hashes.", ""]
    return "\n".join(lines)
