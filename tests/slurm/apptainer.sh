#!/bin/bash
# Stand-in of apptainer that takes its arguments. The image is a folder whose file `holds` names what
# is in it; the program has a root of its own with that and what is bound, and nothing else of the node.
set -euo pipefail
[ "$1" = exec ] && shift
binds=${APPTAINER_BINDPATH-}
while [[ $1 == --* ]]; do
    case $1 in
        --nv) shift ;;
        --bind) binds+=,$2; shift 2 ;;
        *) echo "unknown flag $1" >&2; exit 255 ;;
    esac
done
image=$1
shift
export binds image
exec unshare --mount --propagation private bash -c '
    set -euo pipefail
    root=$(mktemp -d)
    mount -t tmpfs image "$root"
    show() { # FROM TO OPTIONS
        mkdir -p "$(dirname "$root$2")"
        if [ -d "$1" ]; then mkdir -p "$root$2"; else touch "$root$2"; fi
        mount --bind "$1" "$root$2"
        [ "$3" != ro ] || mount -o remount,ro,bind "$root$2"
    }
    while read -r each; do show "$each" "$each" ro; done <"$image/holds"
    for each in bin lib lib64 sbin; do ln -s "usr/$each" "$root/$each"; done
    mkdir -p "$root/tmp"
    for each in proc dev; do mkdir -p "$root/$each"; mount --rbind "/$each" "$root/$each"; done
    IFS=,
    for each in ${binds#,}; do
        IFS=: read -r from to options <<<"$each"
        show "$from" "${to:-$from}" "${options:-rw}"
    done
    unset IFS
    exec /usr/sbin/chroot "$root" "$@"
' apptainer "$@"
