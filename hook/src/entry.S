/* SPDX-License-Identifier: Apache-2.0
 *
 * dlsym, dlvsym and dlopen. What they do for their caller depends on who the caller is (RTLD_NEXT, $ORIGIN,
 * RUNPATH), and libc takes that from the return address. So for everything that is not ours these jump to
 * libc's function with registers and stack as they came: libc never sees that we were here.
 *
 * The aq_route_* functions (resolve.c) answer in two registers: value and jump. jump != 0: continue there,
 * with the value as the new second argument for dlopen; else the value is the result.
 */

#if defined(__x86_64__)

	.text
	.macro ENTRY name
	.globl \name
	.type \name, @function
	.p2align 4
\name:
	.cfi_startproc
	endbr64
	.endm
	.macro END name
	.cfi_endproc
	.size \name, . - \name
	.endm

ENTRY aq_dlsym
	pushq %rdi
	.cfi_adjust_cfa_offset 8
	pushq %rsi
	.cfi_adjust_cfa_offset 8
	subq $8, %rsp
	.cfi_adjust_cfa_offset 8
	movq 24(%rsp), %rdx
	call aq_route_dlsym
	addq $8, %rsp
	.cfi_adjust_cfa_offset -8
	popq %rsi
	.cfi_adjust_cfa_offset -8
	popq %rdi
	.cfi_adjust_cfa_offset -8
	testq %rdx, %rdx
	jnz 1f
	ret
1:	jmpq *%rdx
END aq_dlsym

ENTRY aq_dlvsym
	pushq %rdi
	.cfi_adjust_cfa_offset 8
	pushq %rsi
	.cfi_adjust_cfa_offset 8
	pushq %rdx
	.cfi_adjust_cfa_offset 8
	movq 24(%rsp), %rcx
	call aq_route_dlvsym
	movq %rdx, %rcx
	popq %rdx
	.cfi_adjust_cfa_offset -8
	popq %rsi
	.cfi_adjust_cfa_offset -8
	popq %rdi
	.cfi_adjust_cfa_offset -8
	testq %rcx, %rcx
	jnz 1f
	ret
1:	jmpq *%rcx
END aq_dlvsym

ENTRY aq_dlopen
	pushq %rdi
	.cfi_adjust_cfa_offset 8
	pushq %rsi
	.cfi_adjust_cfa_offset 8
	subq $8, %rsp
	.cfi_adjust_cfa_offset 8
	call aq_route_dlopen
	addq $8, %rsp
	.cfi_adjust_cfa_offset -8
	popq %rsi
	.cfi_adjust_cfa_offset -8
	popq %rdi
	.cfi_adjust_cfa_offset -8
	testq %rdx, %rdx
	jnz 1f
	ret
1:	movl %eax, %esi
	jmpq *%rdx
END aq_dlopen

#elif defined(__aarch64__)

	.text
	.macro ENTRY name
	.globl \name
	.type \name, %function
	.p2align 4
\name:
	.cfi_startproc
	hint #34 /* bti c */
	.endm
	.macro END name
	.cfi_endproc
	.size \name, . - \name
	.endm
	.macro SAVE
	stp x29, x30, [sp, #-48]!
	.cfi_adjust_cfa_offset 48
	.cfi_rel_offset x29, 0
	.cfi_rel_offset x30, 8
	stp x0, x1, [sp, #16]
	str x2, [sp, #32]
	.endm
	.macro RESTORE
	mov x16, x1
	mov x17, x0
	ldr x2, [sp, #32]
	ldp x0, x1, [sp, #16]
	ldp x29, x30, [sp], #48
	.cfi_adjust_cfa_offset -48
	.cfi_restore x29
	.cfi_restore x30
	.endm

ENTRY aq_dlsym
	SAVE
	mov x2, x30
	bl aq_route_dlsym
	RESTORE
	cbnz x16, 1f
	mov x0, x17
	ret
1:	br x16
END aq_dlsym

ENTRY aq_dlvsym
	SAVE
	mov x3, x30
	bl aq_route_dlvsym
	RESTORE
	cbnz x16, 1f
	mov x0, x17
	ret
1:	br x16
END aq_dlvsym

ENTRY aq_dlopen
	SAVE
	bl aq_route_dlopen
	RESTORE
	cbnz x16, 1f
	mov x0, x17
	ret
1:	mov x1, x17
	br x16
END aq_dlopen

#else
#error "the hook is written for x86-64 and arm64"
#endif

/* Under the version of libc's oldest and of today's. */
#if defined(__x86_64__)
#define OLDEST GLIBC_2.2.5
#else
#define OLDEST GLIBC_2.17
#endif
#define EXPORT(name, oldest)                                                                                 \
	.globl aq_##name##_oldest, aq_##name##_today;                                                         \
	.set aq_##name##_oldest, aq_##name;                                                                   \
	.set aq_##name##_today, aq_##name;                                                                    \
	.symver aq_##name##_oldest, name@oldest;                                                              \
	.symver aq_##name##_today, name@@GLIBC_2.34

EXPORT(dlsym, OLDEST)
EXPORT(dlvsym, OLDEST)
EXPORT(dlopen, OLDEST)

	.section .note.GNU-stack,"",%progbits
