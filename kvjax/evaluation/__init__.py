"""What smaller caches cost in quality: perplexity, retrieval and aggregation, against bytes of K and V.

    scoring      log-probabilities of a text through the paged cache, chunk by chunk
    perplexity   of a text, by sliding windows
    filler       plain English without meaning, names and words
    tasks        questions on long texts, made by a seed
    answering    tasks to prompts, and prompts to scores
    variants     storages (and eviction policies) measured alike
    report       tables, JSON, plots

docs/evaluation.md is the guide, `kvjax eval` the command.
"""
