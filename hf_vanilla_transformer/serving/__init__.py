"""Translation as a service: HTTP on one machine, folders of files, and Ray on many machines."""
