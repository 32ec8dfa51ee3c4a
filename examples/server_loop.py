"""A server's loop on kvkern's ops alone, without kvkern.engine: copy it and put your model in.

Each step is one ragged batch: one token of every request that decodes, then chunks of prompts, as
many tokens as the budget allows. The model is two layers of Multi-head Latent Attention with random
weights, so the tokens mean nothing; how they are made is the point.

    python examples/server_loop.py
"""

from dataclasses import dataclass, field

import torch

import kvkern

VOCAB, HIDDEN, LAYERS, HEADS = 1000, 256, 2, 4
LATENT, ROPE, NOPE, VALUE = 128, 32, 64, 64  # what MLA caches; head dims
MAX_POSITION, PAGE_SIZE, NUM_PAGES, TOKEN_BUDGET = 256, 16, 12, 32
SCALE = (NOPE + ROPE) ** -0.5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# fp32, so that no token depends on rounding; serving takes torch.bfloat16 and "bf16", or "fp8"
DTYPE = torch.float32
FORMAT = kvkern.CacheFormat("fp32", kv_lora_rank=LATENT, rope_dim=ROPE)


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int
    arrives: int  # the step before which it comes
    generated: list[int] = field(default_factory=list)
    num_cached: int = 0
    seq: int = -1  # its pages in the allocator

    @property
    def tokens(self):
        return self.prompt + self.generated


class Model:
    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape, fan_in):
            weight = torch.randn(shape, generator=generator) / fan_in**0.5
            return weight.to(DEVICE, DTYPE)

        self.embedding = randn(VOCAB, HIDDEN, fan_in=1)
        self.head = randn(HIDDEN, VOCAB, fan_in=HIDDEN)
        self.w_q = randn(LAYERS, HIDDEN, HEADS * (NOPE + ROPE), fan_in=HIDDEN)
        self.w_kv_a = randn(LAYERS, HIDDEN, LATENT + ROPE, fan_in=HIDDEN)
        self.w_kv_b = randn(LAYERS, HEADS * (NOPE + VALUE), LATENT, fan_in=LATENT)
        self.w_o = randn(LAYERS, HEADS * VALUE, HIDDEN, fan_in=HEADS * VALUE)
        self.gamma = torch.ones(LATENT, dtype=DTYPE, device=DEVICE)
        rates = 10000 ** (-torch.arange(0, ROPE, 2) / ROPE)
        angles = torch.arange(MAX_POSITION)[:, None] * rates
        self.freqs = torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1).to(DEVICE)

    def __call__(self, tokens, batch, cache):
        """Logits after the last new token of each request; writes the new tokens to the cache."""
        x = self.embedding[tokens]
        for layer in range(LAYERS):
            x = x + self.attention(layer, x, batch, cache) @ self.w_o[layer]
        return x[batch.input_row_offsets[1:] - 1] @ self.head

    def attention(self, layer, x, batch, cache):
        w_uk, w_uv = kvkern.absorb_weights(
            self.w_kv_b[layer], num_heads=HEADS, nope_dim=NOPE, v_dim=VALUE
        )
        q = (x @ self.w_q[layer]).view(-1, HEADS, NOPE + ROPE)
        q_nope, q_rope = q.split([NOPE, ROPE], dim=-1)
        kv = x @ self.w_kv_a[layer]
        # one launch: the latent is normalised, rope key and query are rotated, the pages are filled
        view = cache.view(layer, batch)
        kvkern.write_kv(
            view, kv, self.freqs, self.gamma, q_rope=q_rope, q_rope_out=q_rope, kv_out=kv
        )
        out = x.new_empty(len(x), HEADS, VALUE)
        decode, prefill = batch.split_decode()
        n = decode.num_tokens
        if n:  # absorbed: the query goes into the latent space, and the output comes back from it
            absorbed = torch.cat([kvkern.mla_absorb(q_nope[:n], w_uk), q_rope[:n]], dim=-1)
            view = cache.view(layer, decode)
            latent, _ = kvkern.mla_decode(absorbed, view, softmax_scale=SCALE)
            kvkern.mla_absorb(latent, w_uv, out=out[:n])
        if n < len(x):  # new rows are expanded here; the op expands those it finds in the cache
            latent, k_rope = kv[n:].split([LATENT, ROPE], dim=-1)
            k_nope = torch.einsum("tl,hnl->htn", latent, w_uk).transpose(0, 1)
            v = torch.einsum("tl,hlv->htv", latent, w_uv).transpose(0, 1)
            view = cache.view(layer, prefill)
            out[n:], _ = kvkern.mla_prefill(
                q[n:], k_nope, k_rope, v, view, softmax_scale=SCALE, w_uk=w_uk, w_uv=w_uv
            )
        return out.flatten(1)


@torch.inference_mode()
def serve(model, requests):
    """Run every request to its end; what it got is in ``generated``."""
    cache = kvkern.PagedKVCache(
        FORMAT, num_layers=LAYERS, num_pages=NUM_PAGES, page_size=PAGE_SIZE, device=DEVICE
    )
    allocator = kvkern.PageAllocator(NUM_PAGES, PAGE_SIZE)
    waiting, running, step = sorted(requests, key=lambda r: r.arrives), [], 0
    while waiting or running:
        # 1. admit who has come, as long as there are pages for all that they may grow to; who
        #    would not fit an empty cache should have been refused on arrival
        while waiting and waiting[0].arrives <= step:
            seq = allocator.new_sequence()
            try:
                allocator.append(seq, len(waiting[0].prompt) + waiting[0].max_tokens)
            except kvkern.OutOfPagesError:
                allocator.free(seq)
                break
            waiting[0].seq = seq
            running.append(waiting.pop(0))

        # 2. choose: first the requests that decode, then prompts, in chunks, within the budget
        budget, batch_requests, chunks = TOKEN_BUDGET, [], []
        for request in sorted(running, key=lambda r: len(r.tokens) - r.num_cached > 1):
            chunk = request.tokens[request.num_cached :][:budget]
            if chunk:
                batch_requests.append(request)
                chunks.append(chunk)
                budget -= len(chunk)

        # 3. compute
        step += 1
        offsets = [sum(map(len, chunks[:i])) for i in range(len(chunks) + 1)]
        lengths = [request.num_cached for request in batch_requests]
        table = allocator.table([request.seq for request in batch_requests])
        batch = kvkern.PagedBatch(offsets, lengths, table, device=DEVICE)
        tokens = [token for chunk in chunks for token in chunk]
        logits = model(torch.tensor(tokens, dtype=torch.int64, device=DEVICE), batch, cache)
        next_tokens = logits.argmax(-1).tolist()  # the step's only copy to the host
        num_used = NUM_PAGES - allocator.num_free_pages
        sizes = " + ".join(str(len(chunk)) for chunk in chunks)
        print(f"step {step:2}: {sizes:22} tokens, {num_used:2} of {NUM_PAGES} pages in use")

        # 4. a request whose every token is in the cache has its next one; end those that are done
        for request, chunk, token in zip(batch_requests, chunks, next_tokens, strict=True):
            request.num_cached += len(chunk)
            if request.num_cached == len(request.tokens):
                request.generated.append(token)
            if len(request.generated) == request.max_tokens:
                allocator.free(request.seq)
                running.remove(request)
    allocator.check()


def example_requests():
    generator = torch.Generator().manual_seed(1)
    lengths = [(5, 12, 0), (70, 8, 1), (20, 10, 2), (33, 16, 3), (48, 6, 4)]
    return [
        Request(torch.randint(VOCAB, (prompt,), generator=generator).tolist(), new, arrives)
        for prompt, new, arrives in lengths
    ]


if __name__ == "__main__":
    requests = example_requests()
    serve(Model(), requests)
    for request in requests:
        print(f"prompt of {len(request.prompt)} tokens -> {request.generated}")
