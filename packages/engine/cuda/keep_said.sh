#!/bin/sh
# Runs a compiler; what it says of device code lies beside its object afterwards: OBJECT.said. Of a file that was compiled without `-Xptxas=-v`
# nothing does.
object=
before=
told=
for one in "$@"; do
  [ "$before" = -o ] && object=$one
  [ "$one" = -Xptxas=-v ] && told=yes
  before=$one
done
[ -n "$told" ] || exec "$@"
"$@" > "$object.said" 2>&1
code=$?
[ $code -eq 0 ] || cat "$object.said" >&2
exit $code
