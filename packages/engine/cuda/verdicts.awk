# What is asked of the figures that a session measured: reads figures.jsonl, prints a line for each thing that is asked and what is short of
# it. A figure's ratio is 1 at its limit, and more is better; of a hit it is how many times sooner its first token comes.
#
#   awk -f verdicts.awk figures.jsonl...
#
#   met               all figures that are asked are there, and none is short
#   SHORT             some are below what is asked
#   INCOMPLETE        a case that measures them failed, or gave fewer than it has or none: what is missing may be what is wrong. Exit code 1
#   partly measured   what was measured is met; some cases were not run
#   not measured      none of its cases was run
#
# Each `from` names a case, how many figures it has for the line above it (0: it may be left out), their names, and, where its errors come
# under other names, those.
BEGIN {
  ask(0.90, "exports and imports alone, of one pinned copy")
  from("transfer", 9, "^(export|import|import by layer) [0-9]")
  ask(0.85, "the same beside decodes")
  from("transfer_while_decoding", 2, "^(export|import) while decoding ")
  from("system_beside_decode", 2, "^(exports|imports) beside 8B decode ")
  ask(0.97, "decodes beside them, of decodes alone")
  from("transfer_while_decoding", 6, "^decode load beside ")
  from("system_beside_decode", 2, "^8B decode, batch 32, beside ")
  ask(9, "a hit of the arena, of the same prompt computed")
  from("system_8192", 3, "^warm from the arena.* steps of 8192$")
  from("through the system: cuda random:8b 10000 8192", 1, "^ttft_arena_10000_8b_steps_8192$")
  from("system_512", 0, "^warm from the arena.* steps of 512$")
  from("through the system: cuda random:8b 10000 512", 0, "^ttft_arena_10000_8b_steps_512$")
  ask(0.60, "prefill, of the rate of matrix products")
  from("model_8b", 2, "^8B prefill ")
  ask(0.60, "attention, of torch's flash attention")
  from("torch_attention", 12, "^Attention beside torch's flash,", "^(torch_attention|attention_prefill|attention_tail|Attention beside torch's flash,.*)$")
  ask(0.75, "decodes at batch 1 and 32, equal and unequal, of the memory's speed")
  from("model_8b", 2, "^8B decode bf16 batch (1|32), [0-9]+ tokens each$")
  from("model_8b_unequal", 1, "^8B decode bf16 batch 32, one of ")
  ask(1, "prompts that give the same warm as cold")
  from("system_equal", 2, "^8B: prompts with ")
  from("system_equal_bits", 1, "^8B with equal bits: prompts with ")
  ask(1, "blocks of another engine that come back with the same bits")
  from("connector", 3, "^connector: blocks that came back ")
  ask(0.80, "stores and loads of another engine, of one pinned copy")
  from("connector", 4, "^connector (store|load) ")
}
function ask(least, what) {
  asked[++count] = what
  leasts[count] = least
}
function from(name, figures, names, failures) {
  of[++parts] = count
  cases[parts] = name
  needed[parts] = figures
  patterns[parts] = names
  failing[parts] = failures
}
# The string behind a key, as JSON has it.
function text(key) {
  if (!match($0, "\"" key "\":\"([^\"\\\\]|\\\\.)*\"")) return ""
  return substr($0, RSTART + length(key) + 4, RLENGTH - length(key) - 5)
}
match($0, /"name":"[^"]*"/) {
  name = substr($0, RSTART + 8, RLENGTH - 9)
  if (!match($0, /"ratio":[0-9.e+-]+/)) next
  ratio = substr($0, RSTART + 8, RLENGTH - 8) + 0
  for (i = 1; i <= parts; i++) {
    if (name !~ patterns[i]) continue
    measured[i]++
    if (ratio < leasts[of[i]]) short[of[i]] = short[of[i]] "; " name ": " ratio
    else met[of[i]]++
  }
  next
}
/^[{]"case":/ {
  name = text("case")
  error = text("error")
  left = text("leftOut")
  well = $0 ~ /"ran":true/
  for (i = 1; i <= parts; i++) {
    if (well && name == cases[i]) ran[i] = 1
    if (failing[i] != "" ? name !~ failing[i] : name != cases[i]) continue
    if (error != "") {
      failed[i] = 1
      errors[of[i]] = errors[of[i]] "; " name ": " error
    } else if (left != "") {
      out[i] = left
    }
  }
}
END {
  for (i = 1; i <= parts; i++) {
    line = of[i]
    all[line] += measured[i]
    whole[line] += measured[i] > needed[i] ? measured[i] : needed[i]
    unnamed = ran[i] && !measured[i]  # also of a case that may be left out
    if ((measured[i] >= needed[i] && !unnamed) || failed[i]) continue
    missing[line] = 1
    if (unnamed) errors[line] = errors[line] "; " cases[i] ": gave none of its figures"
    else if (measured[i]) errors[line] = errors[line] "; " cases[i] ": gave " measured[i] " of its " needed[i] " figures"
    else if (out[i] != "") rest[line] = rest[line] "; " cases[i] ": left out, " out[i]
    else unrun[line] = unrun[line] "; " cases[i] ": not run"
  }
  for (i = 1; i <= count; i++) {
    verdict = errors[i] ? "INCOMPLETE" : !all[i] ? "not measured" : short[i] ? "SHORT" : missing[i] ? "partly measured" : "met"
    if (errors[i]) code = 1
    how_many = verdict == "not measured" ? "" : ", " met[i] + 0 " of " whole[i]
    print verdict ": " asked[i] ", " leasts[i] how_many short[i] errors[i] rest[i] (verdict == "not measured" ? "" : unrun[i])
  }
  exit code
}
