#!/usr/bin/env bash
# Import a base image with Python, from this system's packages, in the current folder:
#   bash base_image.sh IMAGE PIP_SETTINGS
set -euo pipefail
# shellcheck source=/dev/null
. /etc/os-release
mmdebstrap --variant=minbase --include=python3,python3-pip "$VERSION_CODENAME" base >&2
ln -s python3 base/usr/bin/python
rm -f base/usr/lib/python3*/EXTERNALLY-MANAGED # as in the official images
printf '%b' "$2" >base/etc/pip.conf
tar --create --directory base . | docker import - "$1"
