"""The doctor: runs the guarantees on a user's own environment, data and settings, and says which hold."""

from tailguard.doctor.examination import CHECKS, Examination, chosen, examine, summary
from tailguard.doctor.patient import Patient, env_patient, gym_patient, patient_of, preset_patient

__all__ = [
    "CHECKS",
    "Examination",
    "Patient",
    "chosen",
    "env_patient",
    "examine",
    "gym_patient",
    "patient_of",
    "preset_patient",
    "summary",
]
