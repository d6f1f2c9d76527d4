# What is asked of the figures that a session measured: reads figures.jsonl, prints a line for each thing that is asked and what is short of
# it. A figure's ratio is 1 at its limit, and more is better; of a hit it is how many times sooner its first token comes.
#
#   awk -f verdicts.awk figures.jsonl
BEGIN {
  ask(0.90, "exports and imports alone, of one pinned copy", "^(export|import|import by layer) [0-9]")
  ask(0.85, "the same beside decodes", "^(export|import) while decoding |^(exports|imports) beside 8B decode")
  ask(0.97, "decodes beside them, of decodes alone", "^decode load beside |^8B decode, batch 32, beside ")
  ask(9, "a hit of the arena, of the same prompt computed", "^warm from the arena|^ttft_arena_[0-9]+_8b")
  ask(0.60, "prefill, of the rate of matrix products", "^8B prefill ")
  ask(0.60, "attention, of torch's flash attention", "^Attention beside torch's flash,")
  ask(0.75, "decodes at batch 1 and 32, equal and unequal, of the memory's speed", "^8B decode bf16 batch (1|32), ([0-9]+ tokens each|one of .*)$")
  ask(1, "prompts that give the same warm as cold", "^8B: prompts with |^8B with equal bits: prompts with ")
}
function ask(least, what, names) {
  asked[++count] = what
  leasts[count] = least
  patterns[count] = names
}
match($0, /"name":"[^"]*"/) {
  name = substr($0, RSTART + 8, RLENGTH - 9)
  if (!match($0, /"ratio":[0-9.e+-]+/)) next
  ratio = substr($0, RSTART + 8, RLENGTH - 8) + 0
  for (i = 1; i <= count; i++) {
    if (name !~ patterns[i]) continue
    measured[i]++
    if (ratio < leasts[i]) short[i] = short[i] "; " name ": " ratio
    else met[i]++
  }
}
END {
  for (i = 1; i <= count; i++) {
    verdict = !measured[i] ? "not measured" : short[i] ? "SHORT" : "met"
    of = measured[i] ? ", " met[i] + 0 " of " measured[i] : ""
    print verdict ": " asked[i] ", " leasts[i] of short[i]
  }
}
