from posenc.doctor.api import ask as ask
