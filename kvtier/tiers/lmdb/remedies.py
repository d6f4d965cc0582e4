"""What a user can do about an error of the filesystem at opening a store.

Owns nothing. Always: a remedy names something to do; "check the disk" is for what nobody foresaw.
"""

import errno

_PERMISSION = "Give this user the folder (chown), or name another one"
_DAMAGED = "The filesystem finds itself damaged: see the kernel's log, and check it while it is not mounted"
_DEVICE = "The device is not there: see the kernel's log, and mount it again"
_REMEDIES = {
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: "Mount it for writing, or name a folder elsewhere: the cache must be able to write there",
    errno.ENOTDIR: "Part of the path is a file: name a folder",
    errno.EEXIST: "A link there leads nowhere: make its target, or name another folder",
    errno.ELOOP: "Its links lead back to themselves: name a real folder",
    errno.ENAMETOOLONG: "Use a shorter path",
    errno.ENOLCK: "The filesystem cannot lock files, and two writers would ruin a store: use a local disk",
    errno.EOPNOTSUPP: "The filesystem lacks what a store needs: use a local disk",
    errno.EIO: "The disk fails: see the kernel's log",
    errno.EBADMSG: _DAMAGED,  # how ext4 and XFS say that a checksum of theirs is wrong
    errno.EUCLEAN: _DAMAGED,
    errno.EMFILE: "This process may open no more files: raise the limit (ulimit -n)",
    errno.ENFILE: "The machine has too many files open: close some, or raise fs.file-max",
    errno.ENOMEM: "Index and inline payloads are mapped into memory: allow this process more addresses (ulimit -v), or "
    "use a smaller capacity",
    errno.EFBIG: "The file would be larger than this filesystem or process may have: raise the limit (ulimit -f), or "
    "use a smaller capacity",
    errno.ENODEV: _DEVICE,
    errno.ENXIO: _DEVICE,
    errno.ESTALE: "The server has another folder there by now: mount it again, or use a local disk",
    errno.EBUSY: "Something else uses it: end that, or name another folder",
}


def remedy_of(code: int | None, otherwise: str = "Check its permissions and its disk") -> str:
    """For an errno."""
    return _REMEDIES.get(code or 0, otherwise)
