#!/bin/sh
# A gate for any pipeline: may the build of CONTRACT be at STAGE?  Nothing is measured.
#
#   ./gate.sh CONTRACT STAGE [LEDGER]
#
# The step goes on with 0 alone.  What the others mean is said, for they ask for different people:
# 1 for whoever made the build, 2 and 4 for whoever made the pipeline, 3 for patience.
# $SERVANDA is how servanda is called, if not by its name.

if [ $# -lt 2 ] || [ $# -gt 3 ]; then
    echo "usage: gate.sh CONTRACT STAGE [LEDGER]" >&2
    exit 2
fi
contract=$1 stage=$2
[ $# -eq 3 ] && SERVANDA_LEDGER=$3 && export SERVANDA_LEDGER

${SERVANDA:-servanda} promotion can-promote "$contract" --to "$stage"
code=$?

case $code in
0) echo "gate: open: it was shown that the build may be at $stage" ;;
1) echo "gate: closed: the build broke its contract and was rolled back; it has to be mended" ;;
2) echo "gate: closed: the contract or this call is wrong; see above for the place" ;;
3) echo "gate: closed: it is not shown, or not any more; let servanda promote go on, and ask again" ;;
4) echo "gate: closed: the ledger cannot be read; nothing was decided" ;;
*) echo "gate: closed: servanda ended with $code, which means nothing to this gate" ;;
esac >&2
exit "$code"
